"""JupyterLab as `labkit lab` starts it: beyond this machine it never listens without a token or password."""

import sys

from jupyterlab.labapp import LabApp


class Server(LabApp.serverapp_class):
    """Refuses where the settings, wherever they come from, would let anybody on the network run code."""

    def init_httpserver(self) -> None:
        """Listen, if that is safe: Jupyter allows remote access where it listens beyond loopback."""
        if not self.identity_provider.auth_enabled and self.allow_remote_access:
            self.log.critical(
                f"Not started: at {self.ip or 'all addresses'} anybody on the network could run code here, "
                "for there is no token. Leave the empty token out, or ServerApp.ip."
            )
            self.exit(2)
        super().init_httpserver()


if __name__ == "__main__":
    LabApp.serverapp_class = Server
    sys.exit(LabApp.launch_instance())
