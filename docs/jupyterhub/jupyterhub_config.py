"""A hub of your own on one machine: run by root, for users of the system, reached on this machine only."""

import sys
from pathlib import Path

c = get_config()  # noqa: F821
load_subconfig(str(Path(__file__).absolute().with_name("course.py")))  # noqa: F821

# Others come through a web server with TLS, or an SSH tunnel. Never another address without TLS.
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
c.ConfigurableHTTPProxy.command = [str(Path(sys.executable).with_name("configurable-http-proxy"))]

# Who may log in, with the password of the system: members of these groups.
c.JupyterHub.authenticator_class = "pam"
c.PAMAuthenticator.allowed_groups = {"labkit"}
c.PAMAuthenticator.admin_groups = {"labkit-teachers"}
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"

# A server that nobody has used for an hour ends, with its kernels.
c.JupyterHub.services = [
    {
        "name": "idle-culler",
        "command": [sys.executable, "-m", "jupyterhub_idle_culler", "--timeout=3600", "--cull-every=300"],
    }
]
c.JupyterHub.load_roles = [
    {
        "name": "idle-culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["idle-culler"],
    }
]
