"""Federation over Flower: clients run on other machines. No other engine imports Flower."""
