"""Tools that train, check and export the tiny demo model shipped with exo-mesh."""
