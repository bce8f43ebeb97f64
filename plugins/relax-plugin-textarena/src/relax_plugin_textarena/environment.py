# SPDX-License-Identifier: Apache-2.0
"""TextArena's games as environments: the policy has one seat, others have the rest.

`textarena-team` is for games of teams: the policy has all seats of one, each seat a conversation of its own. A policy
that plays against itself is not offered: a sample has one value for all its tokens, and what one seat wins the other loses.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from relax_core.api import Action, Environment, Observation, Options, Session, Step, Task
from relax_plugin_textarena.opponents import EngineOpponent, Opponent, RandomMoves, Replies

if TYPE_CHECKING:  # it imports TextArena, which takes a second
    from relax_plugin_textarena.match import Match

COLUMN = "textarena"
"""Column of the task file that a task may say its game in."""
FORFEIT = -1.0
"""Worth of a game that the policy does not finish."""
MOVES_OF_OTHERS = 1000
"""Most moves of others between two of the policy; none of the games has as many."""
YOUR_TURN = "It is your turn."
"""Said where the game says nothing: a conversation has to go on with somebody else's words."""


class TextArenaOptions(Options):
    """Options of `textarena`."""

    id: str = "TicTacToe-v0"
    """The game and its variant, as TextArena names them."""
    kwargs: dict[str, Any] = {}
    """Settings of the game, such as `{max_turns = 20}`; which there are is TextArena's."""
    seats: int = Field(0, ge=0)
    """How many play; 0: the fewest that the game is for."""
    seat: int = Field(0, ge=-1)
    """The policy's seat, from 0 on, the team's first where it has a team's; -1: drawn from the seed."""
    opponent: Literal["random", "replies", "engine"] = "random"
    """The others' play: legal moves at random, the same replies in turn, or a pool of `[[engines]]`."""
    replies: tuple[str, ...] = ()
    """Replies of the others, in turn and for ever, such as `["[Cooperate]"]`."""
    engine: str = "opponent"
    """Pool of `[[engines]]` that plays, where an engine does. Its weights stay as they are."""
    engine_prompt: str = "You are playing a game. Answer with your move in the format that the game asks for."
    """System message to that model; empty: none."""
    engine_max_new_tokens: PositiveInt = 256
    """Most tokens of its move."""
    engine_temperature: float = Field(1.0, ge=0.0)
    """0: its likeliest move."""
    after: str = ""
    """Only what the policy says after the last of these marks is its move, such as `</think>`; without the mark it made
    none. Empty: all that it says."""
    reward: Literal["unit", "game"] = "unit"
    """`unit`: 0 lost, 0.5 drawn, 1 won, and alone the game's own from 0 to 1, so that a sample that a limit cuts off, which is
    worth 0, is not worth more than a lost one. `game`: as the game says, -1 to 1."""
    max_refused: PositiveInt = 8
    """Moves in a row that the game may refuse; then the policy has lost. Most games end after two."""
    max_turns: int = Field(0, ge=0)
    """Turns of the policy, after which it has lost; 0: as many as the game has."""
    seed_of: Literal["sample", "task"] = "sample"
    """`task`: all samples of a task, in all epochs, meet the same chance: cards, boards and the others' draws."""

    @model_validator(mode="after")
    def _played(self) -> TextArenaOptions:
        if self.opponent == "replies" and not self.replies:
            raise ValueError('opponent = "replies" needs some: replies = ["..."]')
        if self.opponent != "replies" and self.replies != type(self).model_fields["replies"].default:
            raise ValueError('replies belong to opponent = "replies"; leave them out')
        return self


class TextArenaTeamOptions(TextArenaOptions):
    """Options of `textarena-team`: those of `textarena` with a game of teams."""

    id: str = "Taboo-v0-animals"
    """The game and its variant, as TextArena names them: one of Taboo's."""
    opponent: Literal["random", "replies", "engine"] = "replies"
    """The other team's play: the same replies in turn, or a pool of `[[engines]]`; nobody draws words at random."""
    replies: tuple[str, ...] = ("...",)
    """Replies of the others, in turn and for ever. A clue that has a forbidden word is refused, and so an error."""


class TaskGame(Options):
    """The column `textarena` of a task: what it names wins over the options."""

    id: str = ""
    """The game; with another than the options', the options' `kwargs` do not apply."""
    kwargs: dict[str, Any] = {}
    """Settings of the game."""
    seed: int = Field(0, ge=0)
    """Cards, boards and the others' draws of all samples of the task."""
    seats: int = Field(0, ge=0)
    """How many play; 0: the fewest."""
    seat: int = Field(0, ge=-1)
    """The policy's seat."""


@dataclass(slots=True)
class Table:
    """A match that has begun, with a player for each seat that the policy does not have."""

    match: Match
    seat: int
    """The policy's, or its team's first."""
    own: range
    """The seats of the policy."""
    others: dict[int, Opponent]
    chance: int
    """The seed that everything of it was drawn from."""


class TextArena(Environment[TextArenaOptions]):
    """A game of TextArena, worth what it gives the policy's seat at its end."""

    gives_reward: ClassVar[bool] = True
    preload: ClassVar[tuple[str, ...]] = ("relax_plugin_textarena.match",)
    plays_team: ClassVar[bool] = False

    def __init__(self, options: TextArenaOptions | None = None) -> None:
        super().__init__(options)
        if self.options.opponent == "engine":
            self.needs_engines = (self.options.engine,)

    @classmethod
    async def open(cls, options: TextArenaOptions) -> object:
        """Refuse a game that can't be played before the first sample asks for it."""
        begun(options, None, "", 0, cls.plays_team)
        return None

    async def reset(self, task: Task, seed: int) -> Observation | None:
        await self._start(task, seed)
        return Observation(told(self._table.match, self._table.seat))

    async def step(self, action: Action) -> Step:
        match, seat = self._table.match, self._table.seat
        await self._move(action.text)
        over = self._over()
        return Step(told(match, seat), over, self._worth() if over else None, self._info())

    async def _start(self, task: Task, seed: int) -> None:
        """Begin the task's game, up to the policy's first turn."""
        self._table = self._begin(task, seed)
        self._turns = self._refused = self._refused_now = self._refused_of_others = 0
        await self._let_others_play()
        if self._table.match.done:  # in which the policy had no part, so that it is worth nothing that could be learned
            raise RuntimeError(f"{self._table.match.variant} ended before the policy's first turn; choose another seat")

    async def _move(self, text: str) -> None:
        """Make the policy's move, and those of the others until it is the policy's turn again."""
        taken = self._table.match.say(moved(text, self.options.after))
        self._turns += 1
        self._refused += not taken
        self._refused_now = 0 if taken else self._refused_now + 1
        await self._let_others_play()

    def _over(self) -> bool:
        stalled = self._refused_now >= self.options.max_refused
        return self._table.match.done or stalled or 0 < self.options.max_turns <= self._turns

    def _worth(self) -> float:
        match, unit = self._table.match, self.options.reward == "unit"
        worth = match.value(self._table.seat) if match.done else FORFEIT
        if not unit:
            return worth
        return min(1.0, max(0.0, worth if match.seats == 1 else (worth + 1) / 2))

    def _info(self) -> dict[str, Any]:
        match, seat = self._table.match, self._table.seat
        counts = {"seat": seat, "refused": self._refused, "refused_of_others": self._refused_of_others}
        return {**counts, "reason": match.reason(seat)} if match.done else counts

    def _begin(self, task: Task, seed: int) -> Table:
        table = begun(self.options, task.metadata.get(COLUMN), task.id, seed, self.plays_team)
        if self.options.opponent == "engine":
            for seat in table.others:
                table.others[seat] = EngineOpponent(
                    self.engines[self.options.engine], self.options.engine_prompt, self.options.engine_max_new_tokens,
                    self.options.engine_temperature, table.chance + seat,
                )  # fmt: skip
        return table

    async def _let_others_play(self) -> None:
        for _ in range(MOVES_OF_OTHERS):
            if self._table.match.done or self._table.match.seat in self._table.own:
                return
            self._refused_of_others += not await play(self._table)
        raise RuntimeError(f"{self._table.match.variant}: the others moved {MOVES_OF_OTHERS} times in a row")


class TextArenaTeam(TextArena, Environment[TextArenaTeamOptions]):
    """A game of teams in which the policy has all seats of one, each a conversation of its own, worth the team's result."""

    plays_team: ClassVar[bool] = True

    async def run(self, task: Task, seed: int, session: Session) -> None:
        await self._start(task, seed)
        match, seats = self._table.match, self._table.own
        members = {seat: session if seat == seats[0] else session.restart(task.prompt) for seat in seats}
        member = session
        while not self._over():
            member = members[match.seat]
            member.observe(told(match, match.seat))
            await self._move((await member.generate()).text)
        member.reward(self._worth())


def begun(options: TextArenaOptions, column: object, name: str, seed: int, team: bool) -> Table:
    """Begin the game of a task. Raises ValueError for one that can't be, naming the task and what to change."""
    from relax_plugin_textarena.match import Match, game_of

    try:
        row = TaskGame.model_validate({} if column is None else column).model_dump(exclude_unset=True)
        variant = row.get("id", options.id)
        game = game_of(variant)
        if team != game.team:
            raise ValueError(
                f"{variant} is {'not ' * team}a game of teams; its environment is textarena{'-team' * (not team)}"
            )
        chance = row.get("seed", zlib.crc32(name.encode()) if options.seed_of == "task" else seed)
        settings = row.get("kwargs", {} if "id" in row else options.kwargs)
        match = Match(variant, settings, row.get("seats", options.seats), chance)
        seat = row.get("seat", options.seat)
        size = match.seats // 2 if team else 1
        if seat < 0:
            seat = Random(f"seat {chance}").randrange(match.seats // size) * size
        if seat >= match.seats or seat % size:
            raise ValueError(
                f"{variant} has the seats 0 to {match.seats - 1}, and no {'team that begins ' * team}at {seat}"
            )
        if options.opponent == "random" and match.seats > size and not game.moves:
            raise ValueError(f'{variant} has no opponent that moves at random: choose "replies" or "engine"')
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"task {name}: column {COLUMN} says {column!r}, which is no game: {wrong}") from error
    except ValueError as error:
        raise ValueError(f"task {name}: {error}" if column is not None else str(error)) from error
    own = range(seat, seat + size)
    others: dict[int, Opponent] = {}
    for other in (other for other in range(match.seats) if other not in own):
        scripted = options.opponent == "replies"
        others[other] = Replies(options.replies) if scripted else RandomMoves(game, chance + 1 + other)
    return Table(match, seat, own, others, chance)


async def play(table: Table) -> bool:
    """Let the other whose turn it is move; return False where the game refused that."""
    match, seat = table.match, table.match.seat
    heard = match.heard(seat)
    text = await table.others[seat].move(match, joined(heard), heard)
    taken = match.say(text)
    if not taken and table.others[seat].scripted:
        raise ValueError(f"{match.variant} refuses {text[:100]!r} of its scripted opponent; correct replies")
    return taken


def told(match: Match, seat: int) -> str:
    return joined(match.heard(seat))


def joined(heard: list[tuple[str, str]]) -> str:
    """Messages as one text; others by name."""
    return "\n".join(f"[{who}] {text}" if who else text for who, text in heard).strip("\n") or YOUR_TURN


def moved(text: str, after: str) -> str:
    """The part of a response that is the move."""
    if not after:
        return text
    _, mark, move = text.rpartition(after)
    return move if mark else ""
