"""What lohan is measured beside: the systems, their workers, and how they are driven. `make bench` is the way in."""
