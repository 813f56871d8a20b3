"""JupyterLab as `make lab` starts it: beyond this machine it never listens without a token or password."""

import ipaddress
import socket
import sys

from jupyterlab.labapp import LabApp


class Server(LabApp.serverapp_class):
    """Refuses where the settings, wherever they come from, would let anybody on the network run code."""

    def init_httpserver(self) -> None:
        """Listen, if that is safe."""
        if not (self.sock or self.identity_provider.auth_enabled or only_here(self.ip)):
            self.log.critical(
                f"Not started: at {self.ip or 'all addresses'} anybody on the network could run code here, "
                "for there is no token. Leave the empty token out, or ServerApp.ip."
            )
            self.exit(2)
        super().init_httpserver()


def only_here(host: str) -> bool:
    """Whether only this machine reaches a server that listens at this address, or at this name."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host, None)} if host else set()
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).split("%")[0]).is_loopback for each in found)


if __name__ == "__main__":
    LabApp.serverapp_class = Server
    sys.exit(LabApp.launch_instance())
