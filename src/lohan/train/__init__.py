"""From a config file and data to a trained model. Nothing here is imported before it is used."""
