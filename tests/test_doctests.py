"""The examples in the docstrings are true."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import flwr_leakage
import simulations.papers

MODULES = sorted(
    module.name
    for package in (flwr_leakage, simulations.papers)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name):
    module = importlib.import_module(name)
    failures, _ = doctest.testmod(module, extraglobs={"torch": torch})
    assert failures == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    modules = map(importlib.import_module, MODULES)
    assert sum(len(test.examples) for module in modules for test in finder.find(module)) >= 20
