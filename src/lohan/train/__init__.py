"""From a config file and data to a trained model: config, data, the loop. Nothing here is imported before it is used."""
