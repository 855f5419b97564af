"""One run on disk: its folder, its records and what follows it."""
