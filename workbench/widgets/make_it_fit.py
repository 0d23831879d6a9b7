"""The one button: what makes the recipe fit, and once it fits, the script to take home."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from workbench.advise.candidate import Candidate, rank
from workbench.advise.plan import Search, families
from workbench.base.categories import format_bytes
from workbench.prediction.predict import Prediction, resolve_model
from workbench.recipe import Recipe
from workbench.techniques import Numerics
from workbench.widgets.controls import show_if
from workbench.widgets.gauge import Limit
from workbench.widgets.light import Button
from workbench.widgets.part import SEARCH, URGENT, Background, reason_of
from workbench.widgets.savings import Offer

Choose = Callable[[Recipe], None]


class MakeItFit(Background):
    """One button, labelled with what it will do: take the cheapest changes that make the recipe fit, or, once it fits,
    take the script home.

    Args:
        choose: is called with the recipe that the user takes.
        take_home: is called when the button is pressed while the recipe fits.
    """

    waits_for = (URGENT, SEARCH)

    def __init__(self, choose: Choose, take_home: Callable[[], object]) -> None:
        super().__init__()
        self.choose = choose
        self.take_home = take_home
        self.candidates: Sequence[Candidate] = ()
        # counts in the candidates: the button offers this one
        self.position = 0
        self.fits = False
        self.button = Button(css="wb-action")
        self.another = Button(css="wb-link wb-hidden")
        self.button.on_click(self._press)
        self.another.on_click(self._next)
        self.say("Predicting …")

    def say(self, reason: str) -> None:
        """Say why there is nothing to press yet."""
        self._settle(f"Make it fit\n{reason}", fits=False)

    def offer_script(self) -> None:
        """Offer the script: the recipe fits."""
        self._settle("Take the script home\nplain Hugging Face code, needs no workbench", fits=True)

    def _settle(self, description: str, *, fits: bool) -> None:
        """End the search, and label the button."""
        self.stop()
        self.candidates = ()
        self.fits = fits
        self._write(description, is_on=fits)

    def search(self, recipe: Recipe, limit: Limit, offers: Mapping[str, Offer]) -> None:
        """Find what makes a recipe fit, first among the single techniques, whose offers are known."""
        self.ask(recipe, limit, [offer for offer in offers.values() if isinstance(offer, Candidate)])

    def answers(self, recipe: Recipe, limit: Limit, offers: list[Candidate]) -> Iterator[str | Sequence[Candidate]]:
        alone = sorted((offer for offer in offers if offer.fits and offer.saved_bytes > 0), key=rank)
        if alone and alone[0].numerics is Numerics.EXACT:
            yield alone
            return
        tried = 0

        def predictor(wanted: Recipe) -> Prediction:
            nonlocal tried
            self.publish(f"looking for sets of changes: {tried} tried …")
            tried += 1
            return self.predict(wanted, limit.gpu)

        card = limit.card
        search = Search(
            resolve_model(recipe, [limit.gpu]),
            limit.have_bytes,
            predictor,
            families=families(card.compute_capability if card else None),
        )
        plan = search.plan()
        yield sorted([*plan.candidates, *alone], key=rank) or [plan.closest]

    def show_answer(self, answer: str | Sequence[Candidate]) -> None:
        if isinstance(answer, str):
            self._write(f"Make it fit\n{answer}", is_on=False)
        else:
            self.candidates = answer
            self.position = 0
            self._offer()

    def fail(self, error: Exception) -> None:
        self.show_answer(reason_of(error))

    def _offer(self) -> None:
        candidate = self.candidates[self.position]
        if candidate.fits:
            self._write(f"Make it fit\n{in_one_line(candidate)}")
        elif candidate.changes:
            self._write(f"Nothing was found that fits\nclosest: {in_one_line(candidate)}; still {candidate.room}")
        else:
            self._write("Nothing was found that fits\na smaller model, batch or length, or a larger card", is_on=False)

    def _write(self, description: str, *, is_on: bool = True) -> None:
        self.button.description = description
        self.button.disabled = not is_on
        self.another.description = f"another way ({self.position + 1} of {len(self.candidates)})"
        show_if(len(self.candidates) > 1, self.another)

    def _next(self, _: object) -> None:
        if self.candidates:
            self.position = (self.position + 1) % len(self.candidates)
            self._offer()

    def _press(self, _: object) -> None:
        if self.candidates:
            self.choose(self.candidates[self.position].recipe)
        elif self.fits:
            self.take_home()


LOSS = {
    Numerics.EXACT: "same loss",
    Numerics.APPROXIMATE: "nearly the same loss",
    Numerics.DIFFERENT: "another training",
}


def in_one_line(candidate: Candidate) -> str:
    """Describe the changes, as in `Turn on Fused GELU: 3.4 GiB less, 13 % faster, same loss`.

    The time is an estimate (`Candidate.extra_time`).
    """
    percent = round(100 * candidate.extra_time)
    time = "as fast"
    if percent:
        time = f"about {abs(percent)} % {'slower' if percent > 0 else 'faster'}"
    return f"{candidate.words}: {format_bytes(candidate.saved_bytes)} less, {time}, {LOSS[candidate.numerics]}"
