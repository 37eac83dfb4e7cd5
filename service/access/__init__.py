"""Who may use the server, and how much: API keys and quotas."""
