"""veldt recipes: what can be trained."""

from veldt.experiment.recipes import RECIPES


def run(argv: list[str]) -> int:
    if argv:
        print("usage: veldt recipes\n\nLists the recipes. Example:\n  veldt recipes\n")
    for name, recipe in RECIPES.items():
        print(f"{name:15} {(recipe.__doc__ or '').strip()}")
    print("\nTrain one with: veldt train dqn --env CartPole-v1\nList its settings with: veldt train dqn --help")
    return 0
