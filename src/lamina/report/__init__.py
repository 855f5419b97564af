"""Tables and pictures of finished runs."""
