"""Published recipes: each takes the auto plan and returns the plan that its paper prescribes."""

from musigma.init.recipes._admin import Admin
from musigma.init.recipes._deepnorm import DeepNorm, deepnorm_constants
from musigma.init.recipes._delta_orthogonal import DeltaOrthogonal
from musigma.init.recipes._ds_init import DSInit
from musigma.init.recipes._find import find_recipe, fitted
from musigma.init.recipes._fixup import Fixup
from musigma.init.recipes._gpt2 import Gpt2
from musigma.init.recipes._lsuv import Lsuv
from musigma.init.recipes._mup import Mup, param_groups
from musigma.init.recipes._one_scheme import OneScheme
from musigma.init.recipes._recipe import RECIPES, Recipe
from musigma.init.recipes._rezero import ZeroScale
from musigma.init.recipes._t_fixup import TFixup
from musigma.init.recipes._zero_gamma import ZeroGamma

__all__ = [
    "RECIPES",
    "Admin",
    "DSInit",
    "DeepNorm",
    "DeltaOrthogonal",
    "Fixup",
    "Gpt2",
    "Lsuv",
    "Mup",
    "OneScheme",
    "Recipe",
    "TFixup",
    "ZeroGamma",
    "ZeroScale",
    "deepnorm_constants",
    "find_recipe",
    "fitted",
    "param_groups",
]
