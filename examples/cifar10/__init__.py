"""CIFAR-10 on N towers: a ResNet, trained and evaluated from the command line."""
