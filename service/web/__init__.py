"""From bytes on a socket to a checked request: the server, the app, and what holds for every request."""
