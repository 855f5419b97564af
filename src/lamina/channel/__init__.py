"""What comes between a client's upload and the server's mean: codecs, error feedback, and the bits that are sent."""
