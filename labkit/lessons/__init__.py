"""The lesson notebooks: found, and loaded as modules."""
