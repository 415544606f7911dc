"""What the API tells of the prefix cache."""
