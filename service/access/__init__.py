"""Who may use the server, and how much: API keys, quotas, and the bytes of all requests."""
