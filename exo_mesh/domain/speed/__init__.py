"""How fast engines run models, as measured, and what follows for placement and previews."""
