"""A trained sentence encoder with its attention replaced: what is left of its embeddings."""
