"""What a run tells about itself: metrics on disk, the terminal, the log, and maps of expert load. Plain numbers in."""
