"""The notebooks: executed with papermill, checked parameters, and the pages made of them."""
