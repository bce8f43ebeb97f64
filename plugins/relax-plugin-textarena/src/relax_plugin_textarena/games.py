# SPDX-License-Identifier: Apache-2.0
"""The games of TextArena as data: number of players, templates of moves, and games that Relax can't play.

A game is named by its folder in `textarena.envs`, which all its variants share. A template describes a move: `<0-8>` is
a number, `<a-e>` a letter, `<up,down>` a choice of words, `<near>` a square adjacent to the preceding square; all
further text is literal. To add a game, add a line to `GAMES`.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWN = "<shown>"
"""Template for games whose messages list the legal moves in brackets."""
DIRECTION = "[<up,down,left,right>]"


@dataclass(frozen=True, slots=True)
class Game:
    """The moves and players of one game."""

    moves: tuple[str, ...] = ()
    """Templates that generate every legal move. Empty: moves are free text or have no template, so the game has no
    random opponent."""
    seats: tuple[int, int] = (1, 1)
    """Lowest and highest number of players."""
    team: bool = False
    """True if each half of the seats is a team, which wins and loses together."""


TWO = (2, 2)

GAMES: dict[str, Game] = {
    # alone
    "Bandit": Game(("[<red,blue,green,yellow,purple>]",)),
    "Blackjack": Game(("[<Hit,Stand>]",)),
    "Countdown": Game(("[<0-5> <0-5> <+,-,*,/>]",)),
    "Crosswords": Game(("[<0-15> <0-15> <a-z>]",)),
    "Cryptarithm": Game(("[<A-Z> <0-9>]",)),
    "FifteenPuzzle": Game((DIRECTION,)),
    "FrozenLake": Game((DIRECTION,)),
    "Game2048": Game((DIRECTION,)),
    "GuessTheNumber": Game(("[<1-50>]",)),
    "LightsOut": Game(("[<0-4> <0-4>]",)),
    "LogicPuzzle": Game(),
    "Mastermind": Game(("[<1-6> <1-6> <1-6> <1-6>]",)),
    "Minesweeper": Game(("[<0-7> <0-7>]",)),
    "PegJump": Game(("[<1-15> <1-15>]",)),
    "RushHour": Game(("[<A-Z><+,->]",)),
    "Secretary": Game(("[<accept,continue>]",)),
    "Set": Game(("[<1-12>, <1-12>, <1-12>]",)),
    "Slitherlink": Game(("[<h,v> <0-4> <0-4>]",)),
    "Sokoban": Game((DIRECTION,)),
    "Sudoku": Game(("[<1-9> <1-9> <1-9>]",)),
    "ThreeCardMonte": Game(("[<0-2>]",)),
    "TowerOfHanoi": Game(("[<A-C> <A-C>]",)),
    # against opponents
    "Alquerque": Game(("[<a-e><1-5> <a-e><1-5>]",), TWO),
    "Battleship": Game(("[<A-T><0-19>]",), TWO),
    "Breakthrough": Game(("[<a-h><1-8><near>]", "[<a-j><1-10><a-j><1-10>]"), TWO),
    "Briscola": Game(("[play <1-3>]",), (2, 4)),
    "Chopsticks": Game(("[attack <0-1> <0-1>]", "[split <0-4> <0-4>]"), TWO),
    "ColonelBlotto": Game(("[A<0-20> B<0-20> C<0-20>]", "[A<15-35> B<15-35> C<15-35>]"), TWO),
    "ConnectFour": Game(("[col <0-13>]",), TWO),
    "Crusade": Game((SHOWN,), TWO),
    "GameOfPureStrategy": Game((SHOWN,), TWO),
    "GermanWhist": Game(("[play <1-13>]",), TWO),
    "Golf": Game(("[draw]", "[take]", "[discard]", "[swap <1-2> <1-3>]"), (2, 4)),
    "HighSociety": Game((SHOWN,), TWO),
    "IndianPoker": Game(("[check]", "[call]", "[fold]", "[bet <1-5>]", "[raise <1-5>]"), TWO),
    "IteratedMatchingPennies": Game(("[<heads,tails>]",), TWO),
    "IteratedPrisonersDilemma": Game(("[<Cooperate,Defect>]",), TWO),
    "IteratedRockPaperScissors": Game(("[<rock,paper,scissors>]",), TWO),
    "IteratedTwoThirdsAverage": Game(("[<0-100>]",), TWO),
    "IteratedUltimatumGame": Game(("[Offer: $<0-50>]", "[Accept]", "[Reject]"), TWO),
    "KuhnPoker": Game(("[<check,bet,call,fold>]",), TWO),
    "LiarsDice": Game(("[Call]", "[Bid: <1-6>, <1-6>]"), (2, 15)),
    "LinesOfAction": Game(("[<a-h><1-8><a-h><1-8>]",), TWO),
    "MarketEntryGame": Game(("[<E,S>]",), (2, 15)),
    "MemoryGame": Game(("[<0-7> <0-7> <0-7> <0-7>]",), TWO),
    "NewRecruit": Game(
        ("[Accept]", "[Reject]", "[Propose] <A-E><A-E><A-E><A-E><A-E><A-E><A-E><A-E>"), TWO
    ),
    "Nim": Game(("[<0-6> <1-12>]",), TWO),
    "Othello": Game(("[<0-13>, <0-13>]",), TWO),
    "PigDice": Game(("[<roll,hold>]",), TWO),
    "Poker": Game(("[Check]", "[Call]", "[Fold]", "[Bet <20-100>]", "[Raise <20-100>]"), (2, 15)),
    "PublicGoodsGame": Game(("[<0-20>]",), (2, 15)),
    "QuantumTicTacToe": Game(("[<0-8>,<0-8>]",), TWO),
    "Santorini": Game(("[<N,W,G><1-2><A-E><1-5><near><near>]",), (2, 3)),
    "SecretMafia": Game(("[Player <0-14>]",), (6, 15)),
    "SimpleBlindAuction": Game(("[Bid on Item <0-2>: <1-300>]",), TWO),
    "SimpleNegotiation": Game(
        ("[Accept]", "[Deny]", "[Offer: <1-3> <Wheat,Wood,Sheep> -> <1-3> <Brick,Ore>]"), TWO
    ),
    "SimpleTak": Game((SHOWN,), TWO),
    "Snake": Game((DIRECTION,), (2, 15)),
    "SpiteAndMalice": Game((SHOWN,), TWO),
    "Stratego": Game((SHOWN,), TWO),
    "Surround": Game((DIRECTION,), (2, 15)),
    "Taboo": Game((), (4, 8), team=True),
    "Tak": Game((), TWO),
    "ThreePlayerGOPS": Game((SHOWN,), (3, 3)),
    "ThreePlayerIPD": Game(("[0 <cooperate,defect>] [1 <cooperate,defect>] [2 <cooperate,defect>]",), (3, 3)),
    "ThreePlayerTicTacToe": Game(("[<0-24>]",), (3, 3)),
    "TicTacToe": Game(("[<0-8>]",), TWO),
    "TruthAndDeception": Game(("[Fact <1-2>]",), TWO),
    "TwoDollar": Game(("[Propose] $<0-1>.<0-9>0", "[Accept]", "[Reject]"), TWO),
    "WildTicTacToe": Game((SHOWN,), TWO),
}  # fmt: skip

DOWNLOADS = "it downloads word lists when it is imported"
JUDGE = "it calls a judge model over the network, which needs an API key"
PYTHON = "its source needs Python 3.12"
FILES = "files that it reads are missing from TextArena's distribution"

BARRED: dict[str, str] = {
    **dict.fromkeys(
        ("Codenames", "DontSayIt", "Hangman", "LetterAuction", "SpellingBee", "WordChains", "WordLadder", "WordSearch",
         "Wordle"), DOWNLOADS),
    **dict.fromkeys(("Debate", "GuessWho", "ScenarioPlanning", "TwentyQuestions"), JUDGE),
    **dict.fromkeys(
        ("Checkers", "Chess", "IteratedStagHunt", "Klondike", "ReverseTicTacToe", "UltimateTexasHoldem"), PYTHON),
    **dict.fromkeys(("ScorableGames", "UsedCar", "UsedCarNegotiation"), FILES),
    "BabyAiText": "it needs the distribution gym, which gymnasium has replaced",
    "CharacterConclave": "it raises on the first message",
    "SettlersOfCatan": "its players can trade without end, regardless of limits",
    "UltimateTicTacToe": "it sends players to boards that are full, where no move is legal",
}  # fmt: skip
"""Games of TextArena 0.7.4 that can't be played, with the reason."""
