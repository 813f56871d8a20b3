"""What a learner's server is, on a hub of one machine. For TLJH this is the whole configuration."""

from pathlib import Path

c = get_config()  # noqa: F821

# By the name that the course has now: an upgrade gives that to another version, for servers that start later.
c.Spawner.cmd = [str(Path(__file__).absolute().with_name("start"))]
c.Spawner.default_url = "/lab/tree/labkit"
# The first start hands out the lessons, and forty servers at once load Jupyter from one disk.
c.Spawner.start_timeout = 180
c.Spawner.http_timeout = 120
