"""veldt recipes: what can be trained."""

from veldt.experiment.recipes import RECIPES


def run(argv: list[str]) -> int:
    if argv:
        print("usage: veldt recipes\n\nLists the recipes. Example:\n  veldt recipes\n")
    for name, recipe in RECIPES.items():
        print(f"{name:12} {(recipe.__doc__ or '').strip()}")
    print("\nTrain one with: veldt train dqn --env CartPole-v1\nAll its settings: veldt train dqn --help")
    return 0
