"""Engines that live outside the package, named ``outside_engines:function`` in tests: all of them are wrong."""

from unskew.extend import UserError, open_loop

number_not_function = 3


def raises(setup):
    raise ConnectionError("no server")


def complains(setup):
    raise UserError("mine: start the server first")


def nothing(setup):
    return None


def half(setup):
    """An engine without most of what an engine has."""

    class Half:
        roster = open_loop(setup).roster

    return Half()


def no_setup():
    return None


def knobs(setup, seed: int = 0):
    return open_loop(setup)


def forgets(setup):
    engine = open_loop(setup)
    engine.memory = None
    return engine
