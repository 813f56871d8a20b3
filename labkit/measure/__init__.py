"""How the course measures."""
