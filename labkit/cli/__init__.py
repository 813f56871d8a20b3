"""The command line of the course, JupyterLab and the machine's doctor."""
