"""The federation: clients on other machines, reached through Flower; nothing outside this package imports Flower."""
