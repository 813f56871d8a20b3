"""The lesson notebooks: found, loaded as modules, hashed with the project code that they reach."""
