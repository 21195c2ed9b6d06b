"""veldt recipes: what can be trained."""

from veldt.experiment.recipes import RECIPES, installed


def run(argv: list[str]) -> int:
    if argv:
        print("usage: veldt recipes\n\nLists the recipes. Example:\n  veldt recipes\n")
    for name, recipe in RECIPES.items():
        print(f"{name:15} {(recipe.__doc__ or '').strip()}")
    for name, point in installed().items():
        print(f"{name:15} {point.value}, installed by {point.dist.name if point.dist else 'another package'}")
    print("\nTrain one with: veldt train dqn --env CartPole-v1\nList its settings with: veldt train dqn --help")
    print("Your own: veldt train my_module:recipe (docs/add_an_algorithm.md)")
    return 0
