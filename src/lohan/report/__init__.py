"""What a training run leaves behind, and the page that shows it: `lohan report`."""
