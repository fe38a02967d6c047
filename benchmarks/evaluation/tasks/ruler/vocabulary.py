"""Words for RULER's tasks: adjectives and nouns for keys, and the words of the user's text for lists."""

from __future__ import annotations

import re

from benchmarks.evaluation.material import Material

ADJECTIVES = """
    amber ancient anxious bitter blunt brave brief bright brisk broken calm careful cheerful clever coarse
    cold crimson curious dapper dark deep distant dizzy dusty eager early empty exact faint fearless fierce
    flat fragile frosty gentle giant gloomy golden graceful grateful grumpy hasty heavy hidden hollow honest
    humble icy jolly kind lazy lively lonely loud lucky mellow merry mild modest narrow nervous nimble noisy
    odd pale patient plain polite proud quick quiet rapid rare ripe rough rusty scarlet secret shallow sharp
    shiny silent silver simple sleepy slender smooth soft solid sour steady stiff strange strong sturdy subtle
    sudden sunny swift tame tender thick thirsty tidy timid tiny tough upset vague vast velvet vivid warm
    weary wet wild windy wise witty wooden young zealous
"""
NOUNS = """
    acorn anchor apple arrow autumn badge bakery balloon banjo barrel basket beacon beetle bell blanket bottle
    branch bridge bucket button cabin camel candle canyon carpet castle cellar chalk cherry chimney circle
    cloud clover coach comet copper cottage cradle cricket crown curtain dagger desert donkey dragon drum
    eagle ember engine falcon feather fence ferry fiddle flute forest fossil fountain fox garden garlic
    glacier glove goblet goose granite guitar hammer harbor hawk helmet heron hill honey hornet island ivory
    jacket jewel jungle kettle kitten ladder lantern lemon leopard lily lizard magnet maple marble meadow
    mirror mitten monkey moth mountain mustard needle nettle oasis ocean olive onion orchard otter owl paddle
    panther parrot pebble pencil pepper piano pigeon pillow planet plum pocket pony prism pumpkin puzzle
    quarry quilt rabbit raft raven ribbon river robin rocket saddle salmon scarf shadow shovel sparrow spider
    spoon squirrel statue stove summit swan tailor temple thistle thunder tiger tower trumpet tulip tunnel
    turtle umbrella valley vase violin walnut walrus whistle willow window winter wizard yarn zebra
"""
KEYS = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
"""Keys of needles: two words each."""
LEAST_LETTERS = 4
"""Letters of a word of the user's text."""


def words_of(material: Material) -> list[str]:
    """The different words of the user's text that are not short, sorted."""
    assert material.text is not None
    found = set(re.findall(r"[a-z]+", material.text.content))
    return sorted(word for word in found if len(word) >= LEAST_LETTERS)
