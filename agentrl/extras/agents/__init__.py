"""Agent loops beside the common ones."""
