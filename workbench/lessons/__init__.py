"""The notebooks: executed with papermill, checked parameters, the pages made of them, copies, and their pictures."""
