"""Which nodes there are: finds them, admits them, and notices when they are gone."""
