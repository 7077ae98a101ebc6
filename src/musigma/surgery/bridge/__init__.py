"""Normalizations and standardizations to and from Keras and Flax."""

from musigma.surgery.bridge._flax import FlaxLayer, from_flax, to_flax
from musigma.surgery.bridge._keras import KerasLayer, from_keras, to_keras

__all__ = ["FlaxLayer", "KerasLayer", "from_flax", "from_keras", "to_flax", "to_keras"]
