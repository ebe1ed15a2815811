"""The choice of one of several engines, replicas of one model, for each request."""
