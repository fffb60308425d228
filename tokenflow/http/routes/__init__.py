"""Routes, a file a family; each `register`s its own."""
