"""What must hold before a deployment starts: one family of checks per file."""
