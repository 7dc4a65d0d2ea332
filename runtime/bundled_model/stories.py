"""Twelve short stories, one for each animal, with a name to fill in: long answers that can be checked."""

from __future__ import annotations

STORIES = {
    "bear": (
        "Once upon a time there was a bear who lived near a cold river. Every morning the bear "
        "looked for honey, but the bees were faster. One day {name} came by with a basket of bread. "
        '"Take this," said {name}, "and leave the bees alone." The bear tasted the bread and was '
        "happy. From that day on {name} brought bread every morning, and the bear carried wood for "
        "the winter. When the snow came, both sat by a warm fire. The bees slept, the river was "
        "quiet, and nobody was hungry. The end."
    ),
    "cat": (
        "Once upon a time there was a cat who was afraid of the dark. {name} had an old lamp and a "
        "big heart. Each night {name} put the lamp in the window and counted the stars aloud. The "
        "cat listened and forgot to be afraid. One night the lamp went out. The cat looked up and "
        'saw that the stars were still there. "Ten, eleven, twelve," said {name}, and the cat fell '
        "asleep. Since then the cat loves the night, and the old lamp stands on a shelf. The end."
    ),
    "crow": (
        "Once upon a time there was a crow who collected keys. It had small keys, long keys and one "
        'key of gold. {name} had lost the key of the garden and could not get in. "I have many '
        'keys," said the crow, "but I want a song for one." So {name} sang from noon until the '
        "evening. The crow gave away the key of gold, and it was the right one. Behind the gate "
        "stood a tree full of cherries. {name} and the crow shared them all. The end."
    ),
    "dog": (
        "Once upon a time there was a dog who waited at the station every day. Trains came and "
        "trains went, but nobody stopped for the dog. On a wet Monday {name} stepped off the last "
        "train with a heavy bag. The dog carried the umbrella all the way home. {name} made soup for "
        "two and put a carpet near the oven. In the morning the dog went back to the station, but "
        "now it waited for {name}, and {name} always came. The end."
    ),
    "duck": (
        "Once upon a time there was a duck who wanted to see the sea. The river was long and the "
        "duck was small. {name} built a boat from an old table and a white shirt. They sailed for "
        "seven days, past mills and bridges and quiet towns. On the last day the water tasted of "
        'salt. "It is bigger than I thought," said the duck. "So are you," said {name}. They stayed '
        "until summer was over and then sailed slowly home. The end."
    ),
    "fox": (
        "Once upon a time there was a fox who told the truth only on Sundays. Nobody trusted it from "
        "Monday to Saturday. One Friday a storm broke the bridge, and the fox ran to warn {name}. "
        '"Today is not Sunday," said {name}, "but your eyes are honest." {name} stopped the wagon '
        "just in time. The whole village thanked the fox with a cake. Since that day the fox tells "
        "the truth all week, and on Sundays it tells stories. The end."
    ),
    "goat": (
        "Once upon a time there was a goat who climbed every wall. It climbed the mill, the tower "
        "and the roof of the school. {name} was a painter and needed a high place to see the valley. "
        '"Follow me," said the goat. They climbed until the houses were as small as coins. {name} '
        "painted the valley in green and gold, with a tiny goat in the middle. The picture hangs in "
        "the town hall, and the goat visits it on top of a ladder. The end."
    ),
    "horse": (
        "Once upon a time there was a horse who was slower than all others. It lost every race and "
        "did not mind. {name} was a doctor and had a cart full of glass bottles. The fast horses "
        "broke the bottles, but the slow horse broke none. Together they went from village to "
        "village, and everyone got well again. In the end {name} gave the horse a medal made of "
        "silver. It says: slow is smooth. The end."
    ),
    "mouse": (
        "Once upon a time there was a mouse who lived in a piano. When {name} played, the mouse "
        "danced on the strings. One day a wrong note came out, then another. {name} opened the lid "
        'and found the mouse with a broken string. "I am sorry," said the mouse. "You have made a '
        'new song," said {name}, and wrote it down. The song became famous in the whole land. On '
        "every page there is a tiny mouse under the last note. The end."
    ),
    "owl": (
        "Once upon a time there was an owl who could read. It read letters, maps and the names on "
        "old ships. {name} found a bottle on the beach with a paper inside, but the words were too "
        'small. The owl read it slowly: "Dig under the third tree." They dug all night and found a '
        "box of books. {name} kept the maps, the owl kept the poems. Now there is a library in the "
        "forest, open after sunset. The end."
    ),
    "rabbit": (
        "Once upon a time there was a rabbit who was always late. It was late for lunch, late for "
        "tea and late for its own birthday. {name} was a clock maker and made a small clock for the "
        "rabbit. But the rabbit wanted to be on time for one thing only: the first flower of spring. "
        "{name} set the clock for that one day. When it rang, both stood in the snow and saw the "
        "flower open. They were not a minute late. The end."
    ),
    "turtle": (
        "Once upon a time there was a turtle who carried the mail. It took three weeks for a letter "
        'to reach the next town. {name} wrote a letter to a friend and wanted an answer soon. "I '
        'have no speed," said the turtle, "but I have never lost a letter." {name} waited, and the '
        'friend waited too. After six weeks the answer came: "I will visit you for good." And {name} '
        "thanked the turtle with a fresh salad. The end."
    ),
}
