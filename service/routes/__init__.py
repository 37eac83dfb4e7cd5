"""What the server answers to: one module a thing that is asked for."""
