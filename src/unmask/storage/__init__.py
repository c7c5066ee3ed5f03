"""Files: atomic writes, safe reading, model folders, published weights."""
