"""From settings to the engines that serve: the checkpoint, its database, and what is computed early."""
