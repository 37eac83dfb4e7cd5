"""What operators see of a server: metrics, logs, traces."""
