"""What an installed AITER has on disk: tuned tables, built kernels, locks. Read without importing it."""
