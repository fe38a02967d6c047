"""Plans of meshes: how many stages of how many shares a model and a prompt need, and what to expect of them."""
