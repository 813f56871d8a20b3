"""The profile of a call, shown as a timeline."""

from IPython.display import display

from labkit import plots
from labkit.profiling.profiles import Profile


def timeline(profile: Profile, *, title: str) -> None:
    """Show a profile as plots.timeline draws it, anywhere in a cell."""
    display(plots.timeline(profile, title=title))
