"""The routes of the server, one module per kind of request."""
