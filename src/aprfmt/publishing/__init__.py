"""What is published on the hub: a model's files, and the card that describes them."""
