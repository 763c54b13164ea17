"""The page at /, by which a browser tries the server and shows what speculation does: files as they are sent, and their
routes."""
