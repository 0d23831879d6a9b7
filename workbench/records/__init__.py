"""What runs leave behind: one JSON file each, tables and pictures of them."""
