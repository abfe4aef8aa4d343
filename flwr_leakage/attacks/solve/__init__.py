"""One Gauss–Newton step and one loop, which all second-order attacks share."""
